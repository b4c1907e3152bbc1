"""Networks and their weights: vision and text towers, adapters, the joint encoder, devices."""
