"""NeMo Gym: the tasks of one of its resource servers, played over HTTP."""
