; Start-up code and interrupt vectors of a 32 KiB cartridge without a mapper (sdasgb syntax).
	.module	crt0
	.globl	_main
	.globl	_vblank_seen

	.area	_HEADER (ABS)
	.org	0x0040			; vertical blank
	jp	vblank
	.org	0x0048			; the other four interrupts stay disabled
	reti
	.org	0x0050
	reti
	.org	0x0058
	reti
	.org	0x0060
	reti

	.org	0x0100			; entry point
	nop
	jp	start
	; 0x0104 .. 0x014F: the logo area stays zero; build.py fills in the title and the checksums.

	.org	0x0150
start:
	di
	ld	sp, #0xE000
	ld	hl, #0xC000		; all working RAM to zero: no initialised globals are needed then
	ld	bc, #0x1F00		; the top 256 bytes hold only the stack
clear:
	xor	a, a
	ld	(hl+), a
	dec	bc
	ld	a, b
	or	a, c
	jr	NZ, clear
	call	_main
forever:
	halt
	nop
	jr	forever

vblank:
	push	af
	ld	a, #1
	ld	(_vblank_seen), a
	pop	af
	reti

	; The order in which the linker lays out the segments.
	.area	_HOME
	.area	_CODE
	.area	_INITIALIZER
	.area	_GSINIT
	.area	_GSFINAL
	.area	_DATA
	.area	_INITIALIZED
	.area	_BSEG
	.area	_BSS
	.area	_HEAP
