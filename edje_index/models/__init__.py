"""Neural networks: vision and text towers, adapters and the joint encoder. Also weights files and devices."""
