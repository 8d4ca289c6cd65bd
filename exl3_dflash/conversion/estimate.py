"""How long encoding a plan will take on this machine, before it begins.

The model is that of docs/performance.md: tiles and the scale search's sample; float32 products of the scale fit, the
errors and the feedback; factorizations; and work that is proportional to the weights. The speed of a tile, at every bit
rate of the plan and with the job's own encoder, and the speed of a product are measured just before; what is left is
its constants from there. Tiles and products use all threads, the rest one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from exl3_dflash.conversion.plan import TILE_WEIGHTS, QuantizationPlan, TensorPlan, padded
from exl3_dflash.conversion.settings import JobSettings
from quantize.encoder import default_threads, encode_tiles
from quantize.workers import BLOCK_COLUMNS, single_threaded_torch

SAMPLE_TILES = 216  # of the scale search, for every min(n, m) tiles of the tensor
FACTORIZATION_SPEED = 0.6  # Cholesky over products, operations per second
SECONDS_PER_WEIGHT = 0.46e-6  # rotations, scales, gathering feedback, packing
TIMED_TILES = 32
PRODUCT_ROWS = 1024


def estimate_seconds(plan: QuantizationPlan, settings: JobSettings) -> float:
    """Seconds that encoding the plan's tensors one after the other will take, two-digit accuracy at best."""
    rates = {tensor.bits for tensor in plan.quantized if tensor.bits is not None}
    tile = {bits: seconds_per_tile(bits, settings.codebook, settings.threads, settings.encoder) for bits in rates}
    speed = product_speed()
    return sum(
        tensor_seconds(tensor, settings, tile[tensor.bits], speed)
        for tensor in plan.quantized
        if tensor.bits is not None
    )


def tensor_seconds(tensor: TensorPlan, settings: JobSettings, tile: float, speed: float) -> float:
    """Seconds of one tensor.

    Args:
        tensor: with bits.
        settings: of the job: calibration, method and threads.
        tile: seconds per tile with all threads.
        speed: operations per second of a product on one thread.
    """
    n, m = padded(tensor.linear.in_features), padded(tensor.linear.out_features)
    encoding = tensor.tiles * (1 + SAMPLE_TILES / min(n, m)) * tile
    products, factored = 0.0, 0.0
    if settings.calibration != "none":
        two_sided = settings.method == "two-sided"
        products = 14.0 * n * m * (n + m) if two_sided else 15.0 * n * n * m
        factored = (n**3 + m**3 * two_sided) / 3
    threads = settings.threads or default_threads()
    return encoding + (products / threads + factored / FACTORIZATION_SPEED) / speed + n * m * SECONDS_PER_WEIGHT


def seconds_per_tile(bits: float, codebook: str, threads: int, encoder: str) -> float:
    """Measured wall time of one tile with all threads busy."""
    count = TIMED_TILES * (threads or default_threads())
    tiles = torch.randn(count, TILE_WEIGHTS, generator=torch.Generator().manual_seed(0))
    encode_tiles(tiles[:4], bits, codebook, threads, encoder=encoder)  # makes its tables
    return best_seconds(lambda: encode_tiles(tiles, bits, codebook, threads, encoder=encoder)) / count


def product_speed() -> float:
    """Measured operations per second of a float32 product on one thread."""
    left, right = torch.ones(PRODUCT_ROWS, PRODUCT_ROWS), torch.ones(PRODUCT_ROWS, BLOCK_COLUMNS)
    with single_threaded_torch():
        return 2 * left.numel() * BLOCK_COLUMNS / best_seconds(lambda: left @ right)


def best_seconds(work: Callable[[], object]) -> float:
    """Wall time of the fastest of three runs: what other programs took is left out."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
