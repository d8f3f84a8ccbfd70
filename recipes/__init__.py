"""Recipes ship with the package; `learner.config.load_recipe` reads them."""
