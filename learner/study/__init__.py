"""The paper's tables and figures in small: named studies, run in parts, a CSV a run, a page a study."""
