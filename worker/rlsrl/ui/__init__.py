"""The page that shows runs: ``rlsrl ui``. It reads run folders, and changes nothing."""
