"""The HTML page: `data` is what its charts draw, `parts` its tables and frame, beside them its style and script."""
