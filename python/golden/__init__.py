"""Golden comparison: does a tree of stablehlo_tools give the same bytes as an earlier one?

    make golden                                     the working tree against the commit before it
    make golden BASE=COMMIT GOLDEN_ARGS='--seeds 0 --only transforms/partition'
    python python/golden/run.py --base COMMIT --only zoo/llama --seeds 0
    python python/golden/run.py --list --only schedule/
    python python/golden/run.py --base COMMIT --diff lit/transforms/partition.mlir:1

A case is one RUN line of a lit test (`lit/transforms/partition.mlir:1`, counted from 1), or one
command on a model of the zoo (`zoo/llama/opt/partition`), on a schedule (`schedule/1f1b/4x8`) or on
a training step that becomes a set of rank programs (`mpmd/llama/1f1b-2`). Its record has, of each
command of the tool, the standard output, the standard error, the exit code and every file written:
bytecode, which has the locations; text without what differs by nature (directories, memory
addresses), and once more as the tool prints it with locations. The records of one tree must be
equal under all seeds of Python's hashes, and those of the two trees to each other;
`differences.toml` lists what may differ, and why.

Inputs are those of the working tree for both: its lit tests, and its models, exported once. So only
`stablehlo_tools` differs. Of that a copy is taken, and records are kept by what is in it, in
`build/golden` or the directory in GOLDEN_CACHE, which several worktrees may share: a tree runs
once, and then only what is new. Commands that compile or run programs take seconds; they run under
the first seed alone.

`corpus.py` lists the cases, `trees.py` copies what is to run, `session.py` runs cases in forks of
`server.py` and records them, `compare.py` tells records apart.
"""
