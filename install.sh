#!/bin/sh
# Installs xscale into a virtual environment: install.sh FOLDER [EXTRA]. Torch comes first, so that nothing else chooses it.
set -eu
venv=$1
extra=${2:-}
python=${PYTHON:-python3}
index=${TORCH_INDEX:-}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "xscale needs Python 3.11 or newer; $python is $("$python" --version). Name another: make train PYTHON=python3.12" >&2
    exit 2
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || {
    echo "$python cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv" >&2
    exit 2
}
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
version=$(sed -n 's/^torch==//p' constraints.txt)

if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    [ -n "$index" ] && set -- --extra-index-url "$index" || set --
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then
        pip install -q "$@" "torch==$version"
    elif ! pip install -q "$@" "torch==$version+cpu" 2>/dev/null; then
        echo "There is no GPU here, and pip finds no CPU build of torch $version; installing the build it finds, which is" >&2
        echo "large. To avoid that, stop and name PyTorch's index of CPU wheels: make train TORCH_INDEX=https://..." >&2
        pip install -q "$@" "torch==$version"
    fi
fi
# DeepSpeed comes as source; its operators are built when they are first used, not now.
DS_BUILD_OPS=0 pip install -q -c constraints.txt -e ".${extra:+[$extra]}"
