"""The settings of the layer: what there is, what is allowed, where values come from."""
