"""Records of arrays that travel: specs, slots, inference messages, versions. numpy only."""
