"""What timelines show: a summary, a Chrome trace, and a page with the pipeline drawn."""
