#!/usr/bin/env bash
# Creates a new .venv and installs the packages of a lock file: requirements/install.sh cpu|gpu. The Makefile calls it.
set -euo pipefail
cd "$(dirname "$0")/.."
lock=requirements/${1:?usage: requirements/install.sh cpu|gpu}.lock

fail() {
  printf 'roll: %s\n' "$@" >&2
  exit 2
}

find_python() { # try each name: a launcher may exist without its Python version, and on Debian venv is a separate package
  local name
  for name in python3.11 python3.12 python3.13 python3; do
    if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      echo "$name"
      return
    fi
  done
  fail "no Python 3.11 or later with venv was found." "Install Python (on Debian, Ubuntu: python3 and python3-venv) and try again."
}

install() { # deepspeed, antlr4 and langdetect are published as source; they are built with the setuptools version of the lock file
  DS_BUILD_OPS=0 .venv/bin/python -m pip install -qq --disable-pip-version-check --no-input --no-deps --no-build-isolation "$@"
}

[ "$(uname -sm)" = "Linux x86_64" ] || fail "the lock files are for Linux on x86-64; this machine is $(uname -sm)."
python=$(find_python)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
grep -E '^[a-z]' "$lock" >"$scratch/all"
torch=$(grep '^torch==' "$scratch/all")

echo "roll: installing $(wc -l <"$scratch/all") packages of $lock into .venv with $("$python" -V); this takes a minute or more"
rm -rf .venv
"$python" -m venv .venv
if ! install "$torch" "$(grep '^setuptools==' "$scratch/all")" 2>"$scratch/errors"; then
  if grep -q "No matching distribution found for torch" "$scratch/errors"; then
    fail "pip does not find $torch for $("$python" -V)." \
      "Add PyTorch's own CPU index to pip's configuration, as an extra index, and try again."
  fi
  cat "$scratch/errors" >&2
  exit 1
fi
grep -v '^deepspeed==' "$scratch/all" >"$scratch/without_deepspeed"
install -r "$scratch/without_deepspeed"
install "$(grep '^deepspeed==' "$scratch/all")" # its build imports torch
