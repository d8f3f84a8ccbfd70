"""From what an agent left behind to a verdict.

`patches` takes the changes out of its container, `protected` leaves out what would change how tests run, `run_script`
composes the run, `verdict` reads its outcome; `grade` does it, in a fresh container. `protected`, `run_script` and
`verdict` only decide: no I/O.
"""
