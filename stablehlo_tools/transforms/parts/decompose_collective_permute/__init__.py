"""How decompose-collective-permute skips transfers of loops."""
