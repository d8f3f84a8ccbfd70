"""Language models that an environment asks: behind an endpoint, or whatever runs its episode."""
