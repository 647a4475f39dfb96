/* Catrap for the Game Boy: the rules of envs/catrap/rules.py in a 32 KiB cartridge without a mapper.
 *
 * D-pad: walk, climb, dig, push.  A: take back a move.  Select: swap cats.
 * Start: begin level `level_request` anew.  B: begin the next level.
 *
 * The screen is 10 x 9 cells of 16 pixels; nothing but the level is ever shown. The cells are
 * background tiles, the cats are sprites. A program on the host reads and writes the globals below
 * (their addresses are in catrap.sym); the game is at rest when `state` is IDLE or WON.
 */
#include <stdint.h>
#include "assets.h" /* written by build.py: cell codes, palettes, tiles, levels */

#define REGISTER(address) (*(volatile uint8_t *)(address))
#define JOYPAD            REGISTER(0xFF00)
#define INTERRUPT_FLAGS   REGISTER(0xFF0F)
#define LCD_CONTROL       REGISTER(0xFF40)
#define SCROLL_Y          REGISTER(0xFF42)
#define SCROLL_X          REGISTER(0xFF43)
#define LCD_LINE          REGISTER(0xFF44)
#define BACKGROUND_COLOURS REGISTER(0xFF47)
#define SPRITE_COLOURS_0  REGISTER(0xFF48)
#define SPRITE_COLOURS_1  REGISTER(0xFF49)
#define INTERRUPT_ENABLE  REGISTER(0xFFFF)
#define TILE_DATA         ((volatile uint8_t *)0x8000)
#define TILE_MAP          ((volatile uint8_t *)0x9800)

#define FIRST_BLANK_LINE 144
#define LCD_ON 0x93 /* background and 8 x 8 sprites, tile data at 0x8000, tile map at 0x9800 */

enum { KEY_RIGHT = 1, KEY_LEFT = 2, KEY_UP = 4, KEY_DOWN = 8, KEY_DIRECTIONS = 15 };
enum { KEY_A = 16, KEY_B = 32, KEY_SELECT = 64, KEY_START = 128 };

enum { BUSY, IDLE, WALKING, FALLING, WON };

#define STRIDE 16 /* of the padded grid; a power of two, so that row and column are the two digits */
#define AT(column, row) ((uint8_t)(((row) + 1) * STRIDE + (column) + 1))
#define WALK_FRAMES 8  /* 2 pixels a frame */
#define FALL_FRAMES 4  /* 4 pixels a frame */
#define REWIND_DEPTH 40
#define SNAPSHOT_SIZE (ROWS * COLUMNS + 5)
#define HOST_LEVEL 255 /* the level in `ram_level` */

/* Read and written by the host. */
volatile uint8_t vblank_seen;
volatile uint8_t state; /* the `phase` whose picture the coming frame shows */
uint8_t level, level_request, monsters, active, num_cats;
uint8_t fast; /* set by the host: no animation, a move takes one frame and a fall one frame a cell */
uint8_t position[2], facing_left[2]; /* cats stand on cells and are not in `cells` */
uint16_t moves;
uint8_t cells[STRIDE * (ROWS + 2)];
uint8_t ram_level[ROWS * COLUMNS];
const uint8_t num_levels = NUM_LEVELS;

static uint8_t phase, keys, new_keys, timer;
static uint8_t pixel_x[2], pixel_y[2], falling[2];
static int8_t velocity_x, velocity_y;
static uint8_t history[REWIND_DEPTH][SNAPSHOT_SIZE], history_next, history_length;
static uint8_t facing_before; /* bit i: cat i faced left before the move in hand */
/* Cells that changed since they were drawn, a ring of 256: nothing falls before it is empty, and a round of
 * falling changes at most 2 * 80 of them. */
static uint8_t redraw[256], redraw_head, redraw_tail;

/* Sprites are composed here and copied by DMA: the hardware ignores writes to them while it draws. */
static uint8_t __at(0xDE00) sprites[160];

/* ldh (0x46), a; ld a, 40; dec a; jr nz, -3; ret: runs in high RAM, the only memory that can be read
 * during the copy. */
static const uint8_t copy_sprites_code[] = {0x3E, 0xDE, 0xE0, 0x46, 0x3E, 0x28, 0x3D, 0x20, 0xFD, 0xC9};
#define copy_sprites ((void (*)(void))0xFF80)

static void read_keys(void) {
    uint8_t before = keys;
    JOYPAD = 0x20; /* directions; the lines need a few cycles to settle */
    keys = JOYPAD; keys = JOYPAD;
    keys = (uint8_t)(~keys & 15);
    JOYPAD = 0x10; /* buttons */
    (void)JOYPAD; (void)JOYPAD; (void)JOYPAD;
    keys |= (uint8_t)((~JOYPAD & 15) << 4);
    JOYPAD = 0x30;
    new_keys = keys & (uint8_t)~before;
}

/* From here on the host must not take the game for one at rest. */
static void begin_work(void) {
    state = BUSY;
#ifdef ORIGINAL_LAYOUT
    REGISTER(0xFFA1) = 1;
#endif
}

static void wait_for_vblank(void) {
    vblank_seen = 0;
    while (!vblank_seen) { __asm__("halt\n nop"); }
}

/* ---- Drawing ---- */

static void draw_cell(uint8_t at) {
    volatile uint8_t *map = TILE_MAP + ((uint16_t)((at >> 4) - 1) << 6) + (((at & 15) - 1) << 1);
    uint8_t tile = (uint8_t)(cells[at] << 2);
    map[0] = tile;
    map[1] = tile + 1;
    map[32] = tile + 2;
    map[33] = tile + 3;
}

static void put(uint8_t at, uint8_t cell) {
    cells[at] = cell;
    redraw[redraw_tail++] = at;
}

static void draw_changed_cells(void) {
    /* The last two blank lines are left alone: a write that comes too late would be lost. */
    while (redraw_head != redraw_tail && (uint8_t)(LCD_LINE - FIRST_BLANK_LINE) < 8) {
        draw_cell(redraw[redraw_head]);
        redraw_head++;
    }
}

static void draw_cats(void) {
    uint8_t cat, part, tile, attributes;
    uint8_t *sprite = sprites;
    for (cat = 0; cat < 2; cat++) {
        uint8_t climbing = cells[position[cat]] == LADDER;
        uint8_t mirrored = facing_left[cat] && !climbing;
        tile = (uint8_t)((climbing ? PICTURE_CAT_ON_LADDER : PICTURE_CAT) << 2);
        attributes = (uint8_t)((mirrored ? 0x20 : 0) | (cat == active ? 0 : 0x10));
        for (part = 0; part < 4; part++) {
            uint8_t right = (part & 1) ^ mirrored;
            sprite[0] = cat < num_cats ? (uint8_t)(pixel_y[cat] + 16 + ((part & 2) << 2)) : 0;
            sprite[1] = (uint8_t)(pixel_x[cat] + 8 + (right << 3));
            sprite[2] = (uint8_t)(tile + part);
            sprite[3] = attributes;
            sprite += 4;
        }
    }
}

static void place_cats(void) {
    uint8_t cat;
    for (cat = 0; cat < 2; cat++) {
        pixel_x[cat] = (uint8_t)(((position[cat] & 15) - 1) << 4);
        pixel_y[cat] = (uint8_t)(((position[cat] >> 4) - 1) << 4);
    }
}

#ifdef ORIGINAL_LAYOUT
/* Shows the game to the host as the commercial game does, for tests of the code that reads that one. */
static const uint8_t original_code[] = {0, 5, 4, 1, 3, 2, 6};

static void mirror_original_layout(void) {
    uint8_t row, column, cat;
    if (state != IDLE && state != WON) return;
    for (row = 0; row < ROWS; row++)
        for (column = 0; column < COLUMNS; column++)
            REGISTER(0xC111 + row * 16 + column) = original_code[cells[AT(column, row)]];
    for (cat = 0; cat < num_cats; cat++) REGISTER(0xC100 + position[cat]) += 0x10;
    REGISTER(0xFFA3) = level;
    REGISTER(0xFFA4) = state == WON;
    REGISTER(0xFFD7) = pixel_y[active];
    REGISTER(0xFFD8) = pixel_x[active];
    REGISTER(0xFFA1) = 0;
}
#endif

/* ---- Levels ---- */

static void load_level(uint8_t number) {
    const uint8_t *source = levels + (uint16_t)number * (ROWS * COLUMNS);
    uint8_t row, column, at, cell;
    begin_work();
    if (number == HOST_LEVEL) source = ram_level;
    for (at = 0; at < sizeof cells; at++) cells[at] = WALL;
    level = number;
    monsters = num_cats = active = history_next = history_length = 0;
    facing_left[0] = facing_left[1] = 0;
    position[0] = position[1] = 0;
    moves = 0;
    for (row = 0; row < ROWS; row++)
        for (column = 0; column < COLUMNS; column++) {
            cell = *source++;
            at = AT(column, row);
            if (cell == CAT) {
                if (num_cats < 2) position[num_cats++] = at;
                cell = EMPTY;
            }
            if (cell == WALKER || cell == FLYER) monsters++;
            cells[at] = cell;
        }
    /* The screen may be switched off only while it is not drawn; while off, everything can be written. */
    if (LCD_CONTROL & 0x80) while (LCD_LINE < FIRST_BLANK_LINE);
    LCD_CONTROL = 0;
    for (row = 0; row < ROWS; row++)
        for (column = 0; column < COLUMNS; column++) draw_cell(AT(column, row));
    redraw_head = redraw_tail;
    place_cats();
    draw_cats();
    copy_sprites();
    phase = FALLING;
    timer = 0;
    LCD_CONTROL = LCD_ON;
}

/* ---- Rewind: a ring of copies ---- */

static void remember(void) {
    uint8_t *to = history[history_next], row, column;
    const uint8_t *from;
    for (row = 1; row <= ROWS; row++) {
        from = cells + row * STRIDE + 1;
        for (column = 0; column < COLUMNS; column++) *to++ = *from++;
    }
    to[0] = position[0];
    to[1] = position[1];
    to[2] = facing_before;
    to[3] = monsters;
    to[4] = active;
    if (++history_next == REWIND_DEPTH) history_next = 0;
    if (history_length < REWIND_DEPTH) history_length++;
}

static void take_back(void) {
    const uint8_t *from;
    uint8_t row, column, at;
    if (!history_length) return;
    history_length--;
    history_next = (history_next ? history_next : REWIND_DEPTH) - 1;
    from = history[history_next];
    for (row = 0; row < ROWS; row++)
        for (column = 0; column < COLUMNS; column++) {
            at = AT(column, row);
            if (cells[at] != *from) put(at, *from);
            from++;
        }
    position[0] = from[0];
    position[1] = from[1];
    facing_left[0] = from[2] & 1;
    facing_left[1] = from[2] >> 1;
    monsters = from[3];
    active = from[4];
    moves--;
    place_cats();
}

/* ---- Rules ---- */

static uint8_t look(uint8_t at) { /* what is there, cats included */
    if (at == position[0] || at == position[1]) return CAT; /* an absent cat is in the wall at 0 */
    return cells[at];
}

static uint8_t move_sideways(int8_t offset) { /* returns whether anything moved */
    uint8_t target = position[active] + offset, beyond = target + offset;
    facing_left[active] = offset < 0;
    velocity_x = velocity_y = 0;
    switch (look(target)) {
    case EMPTY:
    case LADDER:
        remember();
        break;
    case WALKER:
    case FLYER:
        remember();
        monsters--;
        put(target, EMPTY);
        break;
    case SAND:
        remember();
        put(target, EMPTY);
        break;
    case BOULDER:
        if (look(beyond) != EMPTY) return 0;
        remember();
        put(target, EMPTY);
        put(beyond, BOULDER);
        return 1; /* the cat itself stays */
    default:
        return 0;
    }
    position[active] = target;
    velocity_x = (int8_t)(offset << 1);
    return 1;
}

static uint8_t climb(int8_t offset) { /* returns whether the cat moved */
    uint8_t target = position[active] + offset, ahead = look(target);
    uint8_t on_ladder = cells[position[active]] == LADDER;
    if (ahead == EMPTY ? !on_ladder : (ahead != LADDER || (offset < 0 && !on_ladder))) return 0;
    remember();
    position[active] = target;
    velocity_x = 0;
    velocity_y = offset < 0 ? -2 : 2;
    return 1;
}

static uint8_t move(void) {
    facing_before = (uint8_t)(facing_left[0] | (facing_left[1] << 1));
    if (keys & KEY_RIGHT) return move_sideways(1);
    if (keys & KEY_LEFT) return move_sideways(-1);
    if (keys & KEY_UP) return climb(-STRIDE);
    return climb(STRIDE);
}

static uint8_t drop_one_cell(void) { /* all that has nothing below; lowest row first, so columns fall as one */
    uint8_t row, end, at, cell, cat, any = 0;
    falling[0] = falling[1] = 0;
    for (row = ROWS - 1; row != 0; row--) {
        end = AT(COLUMNS, row - 1);
        for (at = end - COLUMNS; at != end; at++) {
            cell = cells[at];
            if ((cell == BOULDER || cell == WALKER) && look(at + STRIDE) == EMPTY) {
                put(at, EMPTY);
                put(at + STRIDE, cell);
                any = 1;
            }
        }
        for (cat = 0; cat < num_cats; cat++) {
            at = position[cat];
            if (at >> 4 == row && cells[at] == EMPTY && look(at + STRIDE) == EMPTY) {
                position[cat] = at + STRIDE;
                falling[cat] = 16 / FALL_FRAMES;
                any = 1;
            }
        }
    }
    return any;
}

/* ---- One frame ---- */

static void obey(void) {
    begin_work();
    if (new_keys & KEY_A) {
        take_back();
        phase = FALLING; /* nothing will fall, but the changed cells must be drawn before the game is at rest */
    } else if ((new_keys & KEY_SELECT) && num_cats == 2) {
        active ^= 1;
    } else if ((keys & KEY_DIRECTIONS) && move()) {
        moves++;
        phase = fast ? FALLING : WALKING;
        timer = fast ? 0 : WALK_FRAMES;
    }
}

static void advance(void) {
    if (phase == WALKING) {
        pixel_x[active] += velocity_x;
        pixel_y[active] += velocity_y;
        if (--timer) return;
        phase = FALLING;
    }
    if (phase == FALLING) {
        if (timer) {
            pixel_y[0] += falling[0];
            pixel_y[1] += falling[1];
            if (--timer) return;
        }
        if (redraw_head != redraw_tail) return;
        if (drop_one_cell()) {
            timer = fast ? 0 : FALL_FRAMES;
            return;
        }
        place_cats();
        phase = monsters ? IDLE : WON;
    } else if (phase == IDLE && keys) {
        obey();
    }
}

void main(void) {
    uint16_t i;
    INTERRUPT_ENABLE = 0;
    while (LCD_LINE < FIRST_BLANK_LINE);
    LCD_CONTROL = 0;
    for (i = 0; i < sizeof tiles; i++) TILE_DATA[i] = tiles[i];
    for (i = 0; i < 1024; i++) TILE_MAP[i] = WALL << 2;
    for (i = 0; i < sizeof copy_sprites_code; i++) REGISTER(0xFF80 + i) = copy_sprites_code[i];
    BACKGROUND_COLOURS = BACKGROUND_PALETTE;
    SPRITE_COLOURS_0 = ACTIVE_PALETTE;
    SPRITE_COLOURS_1 = INACTIVE_PALETTE;
    SCROLL_X = SCROLL_Y = 0;
    load_level(0);
    INTERRUPT_FLAGS = 0;
    INTERRUPT_ENABLE = 1; /* vertical blank only */
    __asm__("ei");
    for (;;) {
        wait_for_vblank();
        copy_sprites();
        draw_changed_cells();
        state = phase;
#ifdef ORIGINAL_LAYOUT
        mirror_original_layout();
#endif
        read_keys();
        if (new_keys & KEY_B) level_request = level + 1 < NUM_LEVELS ? level + 1 : 0;
        if (new_keys & (KEY_START | KEY_B)) load_level(level_request);
        else advance();
        draw_cats();
    }
}
