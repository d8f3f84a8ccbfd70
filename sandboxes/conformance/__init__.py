"""The contracts of `sandboxes.base` as checks that any backend must pass.

    from sandboxes.conformance.report import broken, check_sandbox

    report = await check_sandbox(lambda limits: MySandbox(limits))
    assert not broken(report)

What a backend does not promise (`Sandbox.promises`) stands in the report as such; everything else it must keep.
"""
