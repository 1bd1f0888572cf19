"""Where KV lives below the accelerator."""
