"""Parts of the HTML page: numbers, charts, templates, style and script."""
