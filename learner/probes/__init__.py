"""Questions to weights and engines: do both sides agree, and may this be served?"""
