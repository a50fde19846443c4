"""The SN of SNGP: layers whose operator norm is bounded, so that hidden distances follow those of the inputs."""
