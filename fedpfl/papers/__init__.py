"""Fill the papers' tables and figures from runs, beside the published numbers."""
