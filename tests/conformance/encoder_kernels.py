"""Prototypes of ExLlamaV3's encoder kernels, read from the headers of its extension without compiling anything.

`encoder_kernels.json` holds those of the versions that were looked at. What another one has:

    python -m tests.conformance.encoder_kernels DIRECTORY_OF_THE_PACKAGE
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

RECORD = Path(__file__).with_name("encoder_kernels.json")
KERNELS = ("quantize_tiles", "quantize_tiles_frac", "quantize_tiles_scratch")
Prototypes = dict[str, list[list[str]]]  # per kernel its parameters: [C++ type, name]


def read_prototypes(package: Path) -> Prototypes:
    """The kernels that a version has and that its bindings offer to Python."""
    sources = package / "exllamav3_ext"
    bindings = (sources / "bindings.cpp").read_text(encoding="utf-8")
    header = (sources / "quant" / "quantize.cuh").read_text(encoding="utf-8")
    found = {}
    for name in KERNELS:
        declared = re.search(rf"\b{name}\s*\(([^)]*)\)\s*;", header)
        if declared and re.search(rf'm\.def\("{name}", &{name}\b', bindings):
            parameters = [" ".join(part.split()) for part in declared[1].split(",")]
            found[name] = [part.rsplit(" ", 1) for part in parameters]
    return found


if __name__ == "__main__":
    print(json.dumps(read_prototypes(Path(sys.argv[1])), indent=1))
