"""Recording of metrics, and statistics over runs."""
