"""Kill a quantization job at random instants, resume it, and compare what comes out with an undisturbed job's.

    python benchmarks/kill_test.py --kills 20 --seed 0 --json kills.json

The job is the embedded pair's, small enough to be run often, with all its steps: rows, measurement, calibration (whose
running sums are kept after every row here, instead of once a minute), one tensor after the other, measurement, files.
Instants are spread over the whole job from the moment its work directory is there, one at random in each of `--kills`
equal parts, counted in CPU seconds of the job, so that other load on the machine hardly moves them; a job that ends
before its instant is run again with an earlier one. Every output must be byte-identical to the undisturbed one,
its report apart from the seconds. Exits with 1 if one is not. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

JOB = ["quantize", "demo", "--target", "demo", "--device", "cpu", "--dtype", "float32", "--threads", "1", "-q"]
SIZES = ["--cal-data", "chat", "--cal-rows", "12", "--cal-cols", "128", "--eval-rows", "4"]
RUN_JOB = "run-job"
POLL_SECONDS = 0.002
EARLIER = 0.9


def run_job(arguments: list[str]) -> None:
    """In a process of its own: the program, keeping the calibration's sums after every row."""
    from exl3_dflash.cli.app import main
    from exl3_dflash.conversion import calibrating

    calibrating.KEEP_SECONDS, calibrating.KEEP_SHARE = 0.0, float("inf")
    main(arguments)


def command(out: Path, *more: str) -> list[str]:
    """The command of the job."""
    return [sys.executable, __file__, RUN_JOB, *JOB, *SIZES, "--out", str(out), *more]


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of an output by name; the report without its times and place."""
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    report = json.loads(files["quantize_report.json"])
    for part in (report, *report["tensors"]):
        part.pop("seconds")
    report.pop("out_dir")
    return files | {"quantize_report.json": json.dumps(report).encode()}


def cpu_seconds(process: int) -> float:
    """CPU time of a running process and its threads so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_until(folder: Path, instant: float) -> tuple[float, bool]:
    """Start the job in an empty `folder` and kill it `instant` CPU seconds after its work directory is there.

    Returns:
        CPU seconds from there to its end, and whether it was killed.
    """
    job = subprocess.Popen(command(folder / "out"))
    manifest = folder / "out.work" / "manifest.json"
    begun = spent = 0.0
    while job.poll() is None:
        try:
            now = cpu_seconds(job.pid)
        except FileNotFoundError:  # it has just ended
            break
        begun = begun or (now if manifest.exists() else 0.0)
        spent = now - begun if begun else 0.0
        if begun and spent >= instant:
            job.kill()
            break
        time.sleep(POLL_SECONDS)
    return spent, job.wait() == -signal.SIGKILL


def kill_and_resume(folder: Path, instant: float, reference: dict[str, bytes]) -> dict[str, Any]:
    """One job killed after `instant` CPU seconds and resumed: what it had finished, and whether the output is right."""
    out, work = folder / "out", folder / "out.work"
    folder.mkdir()
    spent, killed = run_until(folder, instant)
    while not killed:
        shutil.rmtree(folder)
        folder.mkdir()
        instant *= EARLIER
        spent, killed = run_until(folder, instant)
    steps, rows = sorted(path.stem for path in work.glob("*.safetensors")), kept_rows(work)
    if not out.exists() or work.exists():
        resume = ["--resume"] if (work / "manifest.json").exists() else []
        subprocess.run(command(out, *resume), check=True)
    return {
        "cpu_seconds": round(spent, 2),
        "finished": steps,
        "calibration_rows": rows,
        "identical": contents(out) == reference,
        "leftovers": sorted(path.name for path in folder.iterdir() if path != out),
    }


def kept_rows(work: Path) -> int:
    """Calibration rows whose sums were kept."""
    from safetensors import safe_open

    file = work / "calibration.safetensors"
    if not file.exists():
        return 0
    with safe_open(file, framework="pt") as opened:
        rows: int = json.loads(opened.metadata()["facts"])["seen"]["rows_done"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="parts of the job, each killed once")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--first", type=int, default=0, help="first part, to run the test in pieces")
    parser.add_argument("--last", type=int, help="last part; all by default")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    generator = random.Random(options.seed)
    shares = [(part + generator.random()) / options.kills for part in range(options.kills)]
    with tempfile.TemporaryDirectory(prefix="kill-test-") as temporary:
        undisturbed = Path(temporary) / "undisturbed" / "out"
        undisturbed.parent.mkdir()
        total, _ = run_until(undisturbed.parent, float("inf"))
        reference = contents(undisturbed)
        print(f"undisturbed: {total:.1f} CPU s", flush=True)
        results = []
        for number in list(range(options.kills))[options.first : options.last and options.last + 1]:
            result = kill_and_resume(Path(temporary) / str(number), total * shares[number], reference)
            results.append({"kill": number, **result})
            print(json.dumps(results[-1]), flush=True)
    good = sum(result["identical"] and not result["leftovers"] for result in results)
    print(f"{len(results)} jobs killed, {good} outputs identical and nothing left behind")
    if options.json:
        options.json.write_text(json.dumps({"cpu_seconds": total, "seed": options.seed, "kills": results}, indent=1))
    sys.exit(0 if good == len(results) else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == [RUN_JOB]:
        run_job(sys.argv[2:])
    else:
        main()
