#!/usr/bin/env bash
# Make or refresh .venv. Usage: tools/setup.sh run|dev   (called by make, which keeps the stamps)
#   run: what `make demo` and users need.   dev: that, the test tools, Verilator with a C++ compiler and,
#   unless TORCH=0, the CPU build of torch.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:?run or dev}
python=${PYTHON:-python3}
say() { printf 'setup: %s\n' "$*" >&2; }

# apt_install PACKAGE...: only called for what was found missing.
apt_install() {
  local sudo=()
  if [ "$(id -u)" != 0 ]; then sudo=(sudo -n); fi
  if ! command -v apt-get >/dev/null; then
    say "missing: $* (Debian names); install them with your package manager and run make again"
    return 1
  fi
  say "installing $*"
  "${sudo[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  say "Python 3.11 or newer is needed; name one with: make PYTHON=/path/to/python3.11 ..."
  exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  apt_install python3-venv
fi

# A half-made or moved environment cannot run its own pip: begin again.
if [ -e .venv ] && ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  say "the old .venv does not work any more; making a new one"
  rm -rf .venv
fi
if [ ! -e .venv ]; then
  say "making .venv"
  "$python" -m venv .venv
fi
rm -f .venv/.ready-"$kind"-*

pip=(.venv/bin/python -m pip --disable-pip-version-check -qq)
if [ "$kind" = run ]; then
  say "installing tilewright"
  "${pip[@]}" install -e .
  exit 0
fi
say "installing tilewright with its test tools"
if [ "${TORCH:-1}" = 1 ] && ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  # A wheel that pip's own settings find on this machine saves a large download; else the registry's.
  version=2.13.0
  "${pip[@]}" install --no-index --no-deps "torch==$version" 2>/dev/null \
    || "${pip[@]}" install "torch==$version"
fi
if .venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
  "${pip[@]}" install -e '.[dev,torch]'
else
  "${pip[@]}" install -e '.[dev]'
fi

# What builds and runs the RTL. Where CI runs it must be there; elsewhere its tests are skipped.
missing=()
for tool in verilator g++ ccache; do
  command -v "$tool" >/dev/null || missing+=("$tool")
done
if [ ! -e /usr/include/zlib.h ]; then missing+=(zlib1g-dev); fi # for traces in FST
if [ ${#missing[@]} != 0 ] && ! apt_install "${missing[@]}"; then
  say "without ${missing[*]} the RTL cannot be simulated; its tests are skipped"
  [ -z "${CI:-}" ]
fi
