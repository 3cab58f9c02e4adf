"""The style sheet of report.html: one column on a phone, light or dark as the reader's system, light on paper."""

STYLE = """
:root {
  --paper: #fbfaf7; --ink: #1f2328; --soft: #626a73; --rule: #dcd8ce; --panel: #f3f1eb;
  --one: #2f62a3; --two: #c4572a; --three: #3d7d5a; --four: #8a6a1f; --five: #7b4f96;
  --sans: system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif;
  --serif: "Iowan Old Style", "Palatino Linotype", Palatino, "Book Antiqua", Georgia, serif;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  color-scheme: light;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #16181b; --ink: #e3e1db; --soft: #9aa0a6; --rule: #34383d; --panel: #1e2124;
    --one: #7aaee8; --two: #ee8f5f; --three: #7cc09a; --four: #d6b25a; --five: #c39bdd;
    color-scheme: dark;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 2.5rem clamp(1rem, 4vw, 3rem) 4rem; max-width: 74rem;
  background: var(--paper); color: var(--ink); font: 16px/1.5 var(--sans); font-variant-numeric: tabular-nums;
}
h1, h2 { font-family: var(--serif); font-weight: 600; line-height: 1.15; text-wrap: balance; }
h1 { font-size: clamp(1.7rem, 5vw, 2.5rem); margin: 0 0 .35rem; overflow-wrap: anywhere; }
h2 { font-size: 1.45rem; margin: 0 0 1.1rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
section { border-top: 1px solid var(--rule); margin-top: 2.6rem; padding-top: 1.4rem; }
p { margin: .4rem 0; max-width: 46rem; }
.lead { font-family: var(--serif); font-size: 1.15rem; color: var(--soft); }
.note, .ends, .legend { font-size: .82rem; color: var(--soft); }
.failed { color: var(--two); }
code, pre { font-family: var(--mono); font-size: .86em; }
code { overflow-wrap: anywhere; }
pre {
  margin: .4rem 0 0; padding: .9rem 1rem; background: var(--panel); border-radius: 6px;
  white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.45; tab-size: 4;
}
pre .prompt { color: var(--soft); }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: 1.1rem 1.6rem; }
.figures { margin: 1.8rem 0 0; }
.figures div { border-top: 2px solid var(--rule); padding-top: .45rem; }
.figures .first { border-color: var(--one); }
.figures dt { font-size: .82rem; color: var(--soft); }
.figures dd { margin: 0; font-size: 1.5rem; line-height: 1.25; font-family: var(--serif); }
.figures small { display: block; font: .8rem/1.4 var(--sans); color: var(--soft); }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); gap: 1.8rem 2.2rem; }
.single { max-width: 46rem; }
figure { margin: 0; min-width: 0; break-inside: avoid; }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: .35rem; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font: 12px var(--sans); fill: var(--soft); }
svg .unit { font-size: 11px; }
svg .grid { stroke: var(--rule); stroke-width: 1; }
svg .axis { stroke: var(--soft); stroke-width: 1; }
svg .curve { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .curve.dashed { stroke-dasharray: 7 4; }
svg .band { fill: var(--colour); opacity: .16; }
svg .faint { stroke-width: 1; opacity: .35; }
svg .mark { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 5 4; }
svg .marked { fill: var(--ink); stroke: var(--paper); stroke-width: 4; paint-order: stroke; }
.one, .faint { --colour: var(--one); } .two { --colour: var(--two); } .three { --colour: var(--three); }
.four { --colour: var(--four); } .five { --colour: var(--five); } .plain { --colour: var(--ink); }
svg .curve { stroke: var(--colour); }
svg circle { fill: var(--paper); stroke: var(--colour); stroke-width: 2; }
svg .hover { fill: transparent; stroke: none; }
figure .note { margin: .2rem 0 0; }
.key { font-weight: 400; font-size: .82rem; color: var(--soft); margin-right: .8rem; white-space: nowrap; }
figcaption .key:first-of-type { margin-left: .7rem; }
.key::before {
  content: ""; display: inline-block; width: .9rem; height: .2rem; margin-right: .35rem; vertical-align: middle;
  background: var(--colour); border-radius: 2px;
}
.key.faint::before { opacity: .4; }
.key.dashed::before { background: repeating-linear-gradient(90deg, var(--colour) 0 .35rem, transparent 0 .55rem); }
.axes > input { margin: 0 .3rem 1.2rem 0; } .axes > label { margin-right: 1.1rem; }
.axes > div { display: none; }
#axis-tokens:checked ~ .against-tokens, #axis-steps:checked ~ .against-steps, #axis-time:checked ~ .against-time,
#axis-linear:checked ~ .against-linear, #axis-logarithmic:checked ~ .against-logarithmic {
  display: grid;
}
.bar { display: flex; height: 1.6rem; border-radius: 4px; overflow: hidden; gap: 1px; margin: .5rem 0 .7rem; }
.bar i { background: var(--colour); min-width: 1px; }
.plot { position: relative; padding-left: 1.9rem; }
.plot span { position: absolute; left: 0; width: 1.5rem; text-align: right; }
.plot span { font-size: .75rem; color: var(--soft); line-height: 1; }
.plot .first { top: 0; } .plot .last { bottom: 0; }
.plot img { display: block; width: 100%; image-rendering: pixelated; border-radius: 2px; }
.strip { height: 24px; padding-left: 1.9rem; margin-top: 2px; }
.strip path { fill: var(--two); opacity: .8; }
.heat .note, .ends { margin-left: 1.9rem; }
.ends { display: flex; justify-content: space-between; margin-top: .1rem; margin-bottom: .1rem; }
.legend { display: flex; align-items: center; gap: .6rem; margin-bottom: 1.2rem; }
.legend i { flex: 0 1 11rem; height: .7rem; border-radius: 2px; }
.layouts { display: flex; flex-wrap: wrap; gap: 1.8rem 2.6rem; }
.layout { max-width: 100%; }
.layout figcaption code { display: block; font-weight: 400; }
.heads { display: flex; flex-wrap: wrap; gap: 1rem; }
.head { width: min(13rem, 100%); }
.head img { display: block; width: 100%; image-rendering: pixelated; }
.head img { border: 1px solid var(--rule); background: var(--panel); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; padding: .28rem 1.4rem .28rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { font-weight: 400; color: var(--soft); white-space: nowrap; }
td.number { text-align: right; }
.runs table { font-size: .86rem; }
.runs td { white-space: nowrap; } .runs td, .runs th { padding-right: .95rem; }
details { margin: .6rem 0; }
summary { cursor: pointer; font-size: .92rem; color: var(--soft); }
@media (max-width: 40rem) {
  svg text { font-size: 17px; }
  svg .unit { font-size: 16px; }
}
@media print {
  :root { --paper: #fff; }
  .head { width: 8rem; }
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  .grid { grid-template-columns: 1fr 1fr; }
  section { break-inside: auto; }
  h2 { break-after: avoid; }
  img, .bar i, .key::before, .legend i { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
"""
