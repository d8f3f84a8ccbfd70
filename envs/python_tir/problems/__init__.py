"""Where problems come from: given, generated, sets, a mix."""
