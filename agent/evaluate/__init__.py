"""Any chat endpoint or engine on any environment: samples, figures, a report."""
