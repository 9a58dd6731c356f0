"""Vision: image data, decoding, transforms, models, and the recipe that trains on them."""
