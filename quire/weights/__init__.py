"""Where weights come from: model folders, safetensors files, dummy numbers."""
