# Makes the project's environment in .venv, once per state of pyproject.toml and requirements.lock.
# Usage, from the repository's root:  source ops/env.sh EXTRAS     ("" for a user, "test,dev" for the checks)

prism_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "prism needs Python 3.11 or newer; set PYTHON to one" >&2
    return 1
}

prism_environment() {
    local extras=$1 wanted python began=$SECONDS
    wanted="$extras $(cat pyproject.toml requirements.lock | cksum)"
    if [ "$(cat .venv/.prism-environment 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    # An environment made for the checks serves a user too.
    if [ -z "$extras" ] && [ "$(cat .venv/.prism-environment 2>/dev/null)" = "test,dev${wanted}" ]; then
        return
    fi
    python=$(prism_python) || return 1
    echo "prism: making the Python environment in .venv (about a minute, most of it download) ..." >&2
    "$python" -m venv .venv || return 1
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint requirements.lock --editable ".${extras:+[$extras]}" || return 1
    echo "$wanted" > .venv/.prism-environment
    echo "prism: environment ready after $((SECONDS - began)) s" >&2
}

prism_environment "${1:-}"
