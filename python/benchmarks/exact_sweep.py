"""Every pass on every model: does the program that it writes compute the same, exactly?

    python python/benchmarks/exact_sweep.py [--passes TEXT ...] [--seconds N] [PROGRAM ...]

A PROGRAM is a file or the name of a model of `python/models`; the default is all small models.
Each pipeline of PIPELINES runs on the export, and after `partition` if the export has no
collectives yet. A program that the pipeline changes is compared with the export in exact
arithmetic, on one set of inputs, in full or, if it is too large, as a twin. One line for each
pair; then counts. Exit code 1 if a pair differs.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from models.zoo import MODELS, programs

from stablehlo_tools import bindings
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.passes.pipeline import Pipeline, run_pipeline
from stablehlo_tools.verify import Options, verify_artifacts
from stablehlo_tools.verify.twin import verify_twins
from stablehlo_tools.verify.twin.twin import estimated_bytes

# Options with which a pass acts at test size, where its default would find nothing to gain.
PIPELINES = (
    "constrain-batch",
    "create-reduce-scatter",
    "fold-pipeline",
    "roll-layers",
    "expand-pipeline{microbatches=2},partition",
    "expand-pipeline{microbatches=2 schedule=1f1b},partition",
    "expand-pipeline{microbatches=2 schedule=eager-1f1b},partition",
    "offload{memory-limit=LEAST}",
    "rematerialize{memory-limit=LEAST}",
    "rematerialize{offload memory-limit=LEAST}",
    "shard-optimizer",
    "split-layers{counts=1,1}",
    "split-layers{counts=1,2}",
    "accumulate-gradients{microbatches=2}",
    "split-weight-gradients",
    "collective-matmul{rings=all}",
    "hierarchical-collectives{rows=2}",
    "split-batch{against=text}",
    "split-batch{against=text join-mixed}",
    "pipeline-collectives{direction=prefetch}",
    "pipeline-collectives{direction=delay}",
    "pipeline-collectives{direction=sink}",
    "pipeline-collectives{direction=once}",
    "reassociate-collectives",
    "bucket-collectives{against=text}",
    "hold-collectives",
    "break-permute-cycles",
    "schedule-overlap{hardware=tpu-v5e}",
    "decompose-collective-permute{form=collective-permute validity}",
    "thread-tokens",
    "thread-tokens{minimal}",
    "thread-tokens{scope=group form=composite}",
    "create-reduce-scatter,pipeline-collectives,bucket-collectives,thread-tokens",
)
_LEAST = re.compile(r"least memory that was found is ([\d.e-]+) GiB")
BYTES = 2 << 30  # a program that needs more is compared as a twin


def main() -> int:
    """Compares all pairs that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--passes", nargs="*", default=[""], help="parts of the pipelines' texts")
    parser.add_argument("--seconds", type=float, default=180, help="limit of a pair")
    parser.add_argument("programs", nargs="*", metavar="PROGRAM")
    arguments = parser.parse_args()
    verdicts: collections.Counter[str] = collections.Counter()
    for name, program in _programs(arguments.programs):
        seen = {_digest(program)}
        for pipeline, changed in _rewritten(program, arguments.passes):
            if isinstance(changed, str):
                verdict, seconds = changed, 0.0
            elif (digest := _digest(changed)) in seen:
                verdict, seconds = "unchanged", 0.0
            else:
                seen.add(digest)
                started = time.perf_counter()
                verdict = _compared(program, changed, arguments.seconds)
                seconds = time.perf_counter() - started
            verdicts[verdict.partition(":")[0]] += 1
            print(f"{name:32} {pipeline:76} {seconds:6.1f} s  {verdict}", flush=True)
    print(", ".join(f"{verdict} {count}" for verdict, count in sorted(verdicts.items())))
    return 1 if verdicts["differs"] else 0


def _programs(words: list[str]) -> Iterator[tuple[str, Artifact]]:
    for word in words or [model.name for model in programs(large=False, layer_scan=False)]:
        if word in MODELS:
            built = MODELS[word].build()
            text = isinstance(built, str)
            yield word, artifact.parse(built.encode()) if text else artifact.from_exported(built)
        else:
            yield Path(word).stem, artifact.load(word)


def _rewritten(program: Artifact, parts: list[str]) -> Iterator[tuple[str, Artifact | str]]:
    """Yields each pipeline with the program that it writes, or why it writes none."""
    chosen = [text for text in PIPELINES if any(part in text for part in parts)]
    yield from ((text, _run(program, text)) for text in chosen)
    partitioned = _run(program, "partition")
    if not isinstance(partitioned, str) and _digest(partitioned) != _digest(program):
        yield "partition", partitioned
        for text in chosen:
            yield f"partition,{text}", _run(partitioned, text)


def _run(program: Artifact, text: str, least: float = 1e-6) -> Artifact | str:
    """Runs a pipeline. For the limit LEAST it asks the pass, which names the least memory that it
    can reach if a limit is too low."""
    copy = program.copy()
    try:
        run_pipeline(copy, Pipeline.parse(text.replace("LEAST", f"{least:.9f}")))
    except ToolError as error:
        named = _LEAST.search(error.diagnostic.message)
        if named and float(named[1]) > least:
            return _run(program, text, 1.01 * float(named[1]))
        return f"refused: {error.diagnostic.message[:90]}"
    return copy


def _digest(program: Artifact) -> bytes:
    return hashlib.sha256(bindings.write_bytecode(program.module)).digest()


def _compared(before: Artifact, after: Artifact, seconds: float) -> str:
    options = Options(arithmetic="exact", trials=1, partitioned=False, timeout=seconds)
    try:
        if max(estimated_bytes(each.module) for each in (before, after)) > BYTES:
            answer = verify_twins(before, after, options, BYTES)
            same, outputs = answer.same, answer.verification.outputs
        else:
            verification = verify_artifacts(before, after, options)
            same, outputs = verification.same, verification.outputs
    except ToolError as error:
        return f"not compared: {re.sub(r'\s+', ' ', error.diagnostic.message)[:150]}"
    if same:
        return "identical"
    differing = [f"{o.index} ({o.differing}/{o.elements})" for o in outputs if o.differing]
    return f"differs: outputs {', '.join(differing[:6])}"


if __name__ == "__main__":
    sys.exit(main())
