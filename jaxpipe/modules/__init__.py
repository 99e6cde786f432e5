"""Parts that the Linen and NNX frontends share: settings, sharding, the pipeline's call."""
