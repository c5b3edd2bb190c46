# Set-up shared by scripts/demo, scripts/test and scripts/fetch_model; to be sourced by bash.
#
# kvedit_setup makes .venv and installs the repository into it. It is idempotent: a stamp in
# .venv holds the hash of the files that decide what is installed, and while it matches,
# nothing is done. $KVEDIT_HOME (default ~/.cache/kvedit) holds the model and, where the host
# has no uv, a uv of our own.

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export KVEDIT_HOME="${KVEDIT_HOME:-$HOME/.cache/kvedit}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A server imports the host in three processes; without cached bytecode each of them compiles
# thousands of files at every start.
unset PYTHONDONTWRITEBYTECODE
# A download of an interpreter needs a host outside the package index; use what is installed.
export UV_PYTHON_DOWNLOADS=never

VENV_PYTHON="$REPO_ROOT/.venv/bin/python"
SETUP_STAMP="$REPO_ROOT/.venv/kvedit-setup-stamp"

step() { printf '==> %s\n' "$*" >&2; }

fail() {
    printf 'kvedit: set-up: %s\n' "$*" >&2
    exit 1
}

find_uv() {
    local own="$KVEDIT_HOME/tools/bin/uv"
    # A version manager's shim may exist without a uv behind it, so uv must also run.
    if command -v uv >/dev/null && uv --version >/dev/null 2>&1; then
        UV=uv
        return
    fi
    if [ ! -x "$own" ]; then
        step "installing uv into $KVEDIT_HOME/tools"
        # --target leaves the system's packages alone, which Debian's pip insists on.
        python3 -m pip install --quiet --upgrade --target "$KVEDIT_HOME/tools" uv >&2 ||
            fail "expected uv, or python3 with pip to install it, got neither"
    fi
    UV="$own"
}

# sglang's wheels are chosen for 3.11 first; any python3 from 3.10 on is accepted.
pick_python() {
    local candidate
    for candidate in python3.11 python3 python3.12 python3.13 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    fail "expected a Python of 3.10 or later, got none on PATH"
}

# Compiled sources are part of the stamp: an editable install builds them once, at install time.
wanted_stamp() {
    {
        cat "$REPO_ROOT/setup.py" "$REPO_ROOT/pyproject.toml"
        find "$REPO_ROOT/kernels" \( -name '*.cpp' -o -name '*.c' -o -name '*.h' \) -print0 |
            LC_ALL=C sort -z | xargs -0 -r cat
    } | sha256sum | cut -d' ' -f1
}

kvedit_setup() {
    local wanted python
    wanted="$(wanted_stamp)"
    if [ -x "$VENV_PYTHON" ] && [ "$(cat "$SETUP_STAMP" 2>/dev/null)" = "$wanted" ]; then
        step "environment is up to date"
        return
    fi
    find_uv
    if [ ! -x "$VENV_PYTHON" ]; then
        step "making .venv"
        python="$(pick_python)" || exit 1
        "$UV" venv --quiet --python "$python" "$REPO_ROOT/.venv" >&2 ||
            fail "could not make .venv"
    fi
    step "installing kvedit, sglang and the development tools (some 11 GB on a first run)"
    (cd "$REPO_ROOT" && "$UV" pip install --python "$VENV_PYTHON" -e '.[dev,models]' >&2) ||
        fail "could not install; the lines above give the reason"
    # Only now: an interrupted install leaves no stamp, so the next run repeats it.
    printf '%s\n' "$wanted" >"$SETUP_STAMP"
}

kvedit_fetch_model() {
    step "checking the default model"
    "$VENV_PYTHON" "$REPO_ROOT/scripts/fetch_model" --model default >&2 ||
        fail "no default model"
}
