"""Images as requests bring them: fetched, decoded and brought into the form that a model reads,
each step within limits. Needs Pillow, which is imported when the first image comes."""
