"""Networks and the weights they load: vision and text towers, adapters, joint encoder, devices."""
