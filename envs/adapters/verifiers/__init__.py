"""verifiers: single-agent environments of that library, with our runtime as the policy behind their model."""
