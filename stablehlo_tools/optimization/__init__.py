"""The search for the pipeline that makes one program fastest on one machine, with its proof."""
