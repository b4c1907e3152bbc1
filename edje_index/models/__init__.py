"""Vision and text towers, adapters and the joint encoder, with helpers for weights files and devices."""
