"""File and folder names of the base towers that ``fetch_towers`` writes."""

IMAGE_TOWER, TEXT_TOWER = "dinov2_vits14", "minilm_l6_h384"
WEIGHTS, NOTICE = "model.safetensors", "NOTICE"
TIMM_NAME = "vit_small_patch14_dinov2"
