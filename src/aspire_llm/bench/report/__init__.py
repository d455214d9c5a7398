"""One page, or Markdown, from the JSON files that the benchmarks write."""
