"""Five small repositories with a bug each, written for this project, as instances in SWE-bench's row format.

    python -m envs.swe_bench.demo build        # the images, from `sao-base:debian`
    python -m envs.swe_bench.demo rows         # rows.jsonl again, from the same sources

A repository is a series of patches (`series/<name>/*.patch`, as `git format-patch` writes them) and an entry in
`demo.toml`; commit ids are the same wherever it is built.
"""
