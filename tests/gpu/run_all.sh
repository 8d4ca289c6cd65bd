#!/usr/bin/env bash
# All checks that need a GPU, without a network and in under ten minutes on one H200, the build of ExLlamaV3's extension
# included: it is compiled for this machine's GPUs alone (sm_90 there), kept in TORCH_EXTENSIONS_DIR, and not compiled again.
#
#   tests/gpu/run_all.sh [--device cuda:N] [--out DIR] [--seconds 570]
#
# Needs what the package needs, installed: a CUDA build of torch, exllamav3, nvcc of torch's CUDA version unless exllamav3
# was installed with a compiled extension, and quantize's compiled encoder (built here from the checkout where it is
# missing, with scikit-build-core, nanobind, cmake and a C++ compiler).
#
#   PYTHON   the interpreter to use
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export MAX_JOBS=${MAX_JOBS:-$(nproc)} TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$HOME/.cache/exl3_dflash_extensions}

missing=$("$PYTHON" - <<'PY'
import importlib.util
needed = ("torch", "exllamav3", "triton", "safetensors", "transformers", "accelerate", "huggingface_hub", "typer", "rich", "tqdm",
          "filelock", "jinja2", "yaml")
print(*(name for name in needed if importlib.util.find_spec(name) is None))
PY
)
if [ -n "$missing" ]; then
    echo "error: not installed: $missing; install them with pip, torch as a CUDA build" >&2
    exit 1
fi
problem=$("$PYTHON" -c "
from quantize.cuda_requirements import gpu_problem, kernel_problem
print(gpu_problem() or kernel_problem() or '')")
if [ -n "$problem" ]; then
    echo "error: $problem" >&2
    exit 1
fi
if ! "$PYTHON" -c "import quantize._native" 2>/dev/null; then
    echo "building the compiled encoder of quantize" >&2
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-build-isolation --editable . || {
        echo "error: quantize's encoder could not be built: it needs scikit-build-core, nanobind, cmake and a C++17 compiler" >&2
        exit 1
    }
fi
TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$("$PYTHON" -c "
import torch
gpus = (torch.cuda.get_device_capability(gpu) for gpu in range(torch.cuda.device_count()))
print(';'.join(sorted({'{}.{}'.format(*capability) for capability in gpus})))")}
export TORCH_CUDA_ARCH_LIST
exec "$PYTHON" -m tests.gpu.run_all "$@"
