"""Arrays in flight: versions, array specs, slots. numpy only."""
