"""Self-contained HTML pages that the commands write: search results, explanations and reports."""
