"""The routers' papers, equation by equation, one token and one expert at a time. Nothing of xscale is used here."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Sent = dict[tuple[int, int], float]
"""(token, expert) -> weight."""
Rows = list[list[float]]


def scores(x: Tensor, weight: Tensor) -> Rows:
    return [[float(sum(a * b for a, b in zip(row, one, strict=True))) for one in weight.tolist()] for row in x.tolist()]


def softmax(values: Sequence[float]) -> list[float]:
    top = max(values)
    powers = [math.exp(value - top) for value in values]
    return [power / sum(powers) for power in powers]


def best(values: Sequence[float], k: int) -> list[int]:
    return sorted(range(len(values)), key=lambda index: -values[index])[:k]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def switch(x: Tensor, weight: Tensor) -> tuple[Sent, float]:
    """Fedus et al. 2021, equations 1 to 6."""
    rows = [softmax(row) for row in scores(x, weight)]
    sent: Sent = {}
    for token, row in enumerate(rows):
        (expert,) = best(row, 1)
        sent[token, expert] = row[expert]
    tokens, experts = len(rows), len(rows[0])
    loss = 0.0
    for expert in range(experts):
        fraction = sum(1 for _, chosen in sent if chosen == expert) / tokens
        probability = sum(row[expert] for row in rows) / tokens
        loss += fraction * probability
    return sent, experts * loss


def mixtral(x: Tensor, weight: Tensor, k: int) -> Sent:
    """Jiang et al. 2024, section 2.1: softmax over the k highest logits."""
    sent: Sent = {}
    for token, row in enumerate(scores(x, weight)):
        chosen = best(row, k)
        gates = softmax([row[expert] for expert in chosen])
        sent |= {(token, expert): gate for expert, gate in zip(chosen, gates, strict=True)}
    return sent


def deepseek_v3(
    x: Tensor, weight: Tensor, bias: Sequence[float], k: int, groups: int, limit: int, scale: float
) -> Sent:
    """DeepSeek-AI 2024, section 2.1.2: sigmoid gates, a bias for the choice only, groups by their two best."""
    sent: Sent = {}
    for token, row in enumerate(scores(x, weight)):
        gates = [sigmoid(value) for value in row]
        biased = [gate + one for gate, one in zip(gates, bias, strict=True)]
        size = len(gates) // groups
        worth = [sum(sorted(biased[group * size : (group + 1) * size])[-2:]) for group in range(groups)]
        allowed = best(worth, limit)
        masked = [value if index // size in allowed else -math.inf for index, value in enumerate(biased)]
        chosen = best(masked, k)
        total = sum(gates[expert] for expert in chosen)
        sent |= {(token, expert): scale * gates[expert] / total for expert in chosen}
    return sent


def gshard(x: Tensor, weight: Tensor, groups: int, capacity: int, drawn: Sequence[float]) -> tuple[Sent, float]:
    """Lepikhin et al. 2020, algorithm 1, for each group by itself; a second expert that is not drawn takes no place."""
    rows = [softmax(row) for row in scores(x, weight)]
    size, experts = len(rows) // groups, len(rows[0])
    sent: Sent = {}
    losses = []
    for group in range(groups):
        members = range(group * size, (group + 1) * size)
        used = [0] * experts
        mean = [sum(rows[token][expert] for token in members) / size for expert in range(experts)]
        for token in members:
            one, two = best(rows[token], 2)
            gate = rows[token][one] / (rows[token][one] + rows[token][two])
            if used[one] < capacity:
                sent[token, one] = gate
            used[one] += 1
        losses.append(sum(used[expert] / size * mean[expert] for expert in range(experts)) / experts)
        for token in members:
            one, two = best(rows[token], 2)
            gate = rows[token][two] / (rows[token][one] + rows[token][two])
            if 2 * gate > drawn[token]:
                if used[two] < capacity:
                    sent[token, two] = gate
                used[two] += 1
    return sent, sum(losses) / groups


def noisy_topk(x: Tensor, weight: Tensor, noise: Tensor, normal: Rows, k: int) -> tuple[Sent, float, float]:
    """Shazeer et al. 2017, equations 3 to 5 and 6 to 11."""
    clean, spread = scores(x, weight), [[math.log1p(math.exp(v)) for v in row] for row in scores(x, noise)]
    experts = len(weight)
    sent: Sent = {}
    importance, load = [0.0] * experts, [0.0] * experts
    for token in range(len(clean)):
        h = [clean[token][e] + normal[token][e] * spread[token][e] for e in range(experts)]
        kept = best(h, k)
        gates = softmax([h[e] if e in kept else -math.inf for e in range(experts)])
        for expert in range(experts):
            importance[expert] += gates[expert]
            excluded = sorted((h[e] for e in range(experts) if e != expert), reverse=True)[k - 1]
            z = (clean[token][expert] - excluded) / spread[token][expert]
            load[expert] += 0.5 * (1 + math.erf(z / math.sqrt(2)))
        sent |= {(token, expert): gates[expert] for expert in kept}
    return sent, cv_squared(importance), cv_squared(load)


def cv_squared(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2


def expert_choice(x: Tensor, weight: Tensor, capacity: float) -> Sent:
    """Zhou et al. 2022, section 3.2: S = softmax(X W), each expert takes the k = n c / e best of its column."""
    rows = [softmax(row) for row in scores(x, weight)]
    experts = len(rows[0])
    k = int(len(rows) * capacity / experts)
    sent: Sent = {}
    for expert in range(experts):
        column = [row[expert] for row in rows]
        sent |= {(token, expert): column[token] for token in best(column, k)}
    return sent


def prototype(x: Tensor, weight: Tensor, k: int) -> Sent:
    """Yang et al. 2021, section 3.3: softmax and argmax within each of k prototypes."""
    sent: Sent = {}
    for token, row in enumerate(scores(x, weight)):
        size = len(row) // k
        for group in range(k):
            gates = softmax(row[group * size : (group + 1) * size])
            (index,) = best(gates, 1)
            sent[token, group * size + index] = gates[index]
    return sent


def sinkhorn(x: Tensor, weight: Tensor, rounds: int) -> Sent:
    """Clark et al. 2022, appendix: exp(logits) with columns, then rows, divided by their sums, in plain numbers."""
    logits = scores(x, weight)
    plan = [[math.exp(value) for value in row] for row in logits]
    tokens, experts = len(plan), len(plan[0])
    for _ in range(rounds):
        sums = [sum(row[e] for row in plan) for e in range(experts)]
        plan = [[row[e] / sums[e] * tokens / experts for e in range(experts)] for row in plan]
        plan = [[value / sum(row) for value in row] for row in plan]
    return {(t, best(row, 1)[0]): softmax(logits[t])[best(row, 1)[0]] for t, row in enumerate(plan)}


def hungarian(gain: Rows) -> float:
    """Highest total of a square table with one entry a row and a column (Kuhn and Munkres, by potentials)."""
    n = len(gain)
    u, v, match = [0.0] * (n + 1), [0.0] * (n + 1), [0] * (n + 1)
    for row in range(1, n + 1):
        match[0], column = row, 0
        least, before, used = [math.inf] * (n + 1), [0] * (n + 1), [False] * (n + 1)
        while match[column]:
            used[column] = True
            here, delta, following = match[column], math.inf, 0
            for one in range(1, n + 1):
                if not used[one]:
                    cost = -gain[here - 1][one - 1] - u[here] - v[one]
                    if cost < least[one]:
                        least[one], before[one] = cost, column
                    if least[one] < delta:
                        delta, following = least[one], one
            for one in range(n + 1):
                if used[one]:
                    u[match[one]] += delta
                    v[one] -= delta
                else:
                    least[one] -= delta
            column = following
        while column:
            match[column], column = match[before[column]], before[column]
    return sum(gain[match[column] - 1][column - 1] for column in range(1, n + 1))


def mix(x: Tensor, sent: Sent, experts: Sequence[object]) -> Tensor:
    """Each token's weighted sum over the experts that it was sent to; zero where there is none."""
    y = torch.zeros_like(x)
    for (token, expert), weight in sent.items():
        y[token] += weight * experts[expert](x[token])  # type: ignore[operator]
    return y
