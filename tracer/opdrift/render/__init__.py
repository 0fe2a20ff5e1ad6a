"""Turn a diagnosis into text, JSON or Markdown; the renderers decide nothing, they only say."""
