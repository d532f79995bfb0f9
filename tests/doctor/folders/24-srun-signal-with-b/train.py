import mpiddp

mpiddp.should_stop()
