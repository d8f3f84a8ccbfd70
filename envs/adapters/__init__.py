"""Tasks that exist, in other projects' formats, as environments of this one: `docs/suites.md` is the manual page.

Nothing here is imported by the rest of `envs`. A library that an adapter needs is imported when an environment is made.
"""
