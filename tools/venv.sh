#!/usr/bin/env bash
# Makes the virtual environment that a make target needs, or finds it complete and returns at once.
#
# Usage: tools/venv.sh lint        ruff at its pinned version, nothing else
#        tools/venv.sh EXTRAS      torch, then cula in editable mode with these extras ("test", "demo,cpu")
# Environment: PYTHON  interpreter to build it from        (python3)
#              TORCH   requirement, path or URL of a torch (see default_torch); unused where PYTHON has one
#              VENV    folder                              (.venv)
#
# A stamp per set of extras holds what it was made from, so nothing is fetched twice.
set -euo pipefail
cd "$(dirname "$0")/.."

want=${1:?usage: tools/venv.sh lint | EXTRAS}
python=${PYTHON:-python3}
venv=${VENV:-.venv}
stamps=$venv/stamps

fail() {
    echo "make: $*" >&2
    exit 1
}

# The interpreter: its path and version, which identify the environment.
command -v "$python" >/dev/null 2>&1 || fail "no interpreter '$python'; name one: make ... PYTHON=/path/to/python3"
identity=$("$python" -c 'import sys; print(sys.executable, *sys.version_info[:3])') ||
    fail "'$python' does not run; name another: make ... PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "cula needs Python 3.10 or newer, '$python' is older; name another: make ... PYTHON=/path/to/python3"

# The folder where the interpreter keeps a torch >= 2.6, or nothing.
torch_home=$("$python" - <<'PY'
from importlib import metadata
try:
    found = metadata.distribution("torch")
    if tuple(int(part) for part in found.version.split(".")[:2]) >= (2, 6):
        print(found.locate_file(""))
except (metadata.PackageNotFoundError, ValueError):
    pass
PY
)

default_torch() {
    # One known release where CI tests (Python 3.11), any that cula supports elsewhere.
    "$python" -c 'import sys; print("torch==2.13.0" if sys.version_info[:2] == (3, 11) else "torch>=2.6")'
}

make_environment() {
    rm -rf "$venv"
    echo "make: new environment $venv from $identity"
    "$python" -m venv "$venv" ||
        fail "'$python -m venv' failed; on Debian and Ubuntu install the package python3-venv"
    if [ -n "$torch_home" ]; then
        # Not --system-site-packages: where PYTHON is itself in an environment, that would show its base alone.
        echo "$torch_home" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch_home.pth"
    fi
    mkdir -p "$stamps"
    echo "$identity" >"$stamps/python"
}

if ! "$venv/bin/python" -c '' 2>/dev/null || [ "$(cat "$stamps/python" 2>/dev/null)" != "$identity" ]; then
    make_environment
fi

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@" </dev/null
}

if [ "$want" = lint ]; then
    ruff=$(sed -n 's/.*"\(ruff==[^"]*\)".*/\1/p' pyproject.toml | head -n 1)
    stamp=$stamps/lint
    key=$ruff
    if [ "$(cat "$stamp" 2>/dev/null)" != "$key" ]; then
        echo "make: installing $ruff"
        pip "$ruff" || fail "could not install $ruff"
        echo "$key" >"$stamp"
    fi
    exit 0
fi

stamp=$stamps/${want//,/+}
key="$(cksum <pyproject.toml) $PWD ${TORCH:-}"
if [ "$(cat "$stamp" 2>/dev/null)" != "$key" ]; then
    if [ -z "$torch_home" ] || [ -n "${TORCH:-}" ]; then
        torch=${TORCH:-$(default_torch)}
        echo "make: installing $torch"
        pip "$torch" || fail "could not install $torch; name a build that fits your machine: make ... TORCH=..."
    else
        echo "make: using the torch that $python has"
    fi
    echo "make: installing cula[$want]"
    pip "setuptools>=77" && pip --no-build-isolation -e ".[$want]" || fail "could not install cula[$want]"
    echo "$key" >"$stamp"
fi
